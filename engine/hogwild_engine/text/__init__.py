"""Text to tokens and back: chat template, tools, grammars, output parser, paragraphs."""
