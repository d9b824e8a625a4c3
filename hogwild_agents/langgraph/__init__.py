"""The LangGraph adapter: a node that runs a team."""
