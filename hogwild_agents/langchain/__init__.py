"""The LangChain adapter: chat model, messages, replies, structured output, errors."""
