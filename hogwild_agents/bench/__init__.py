"""`hogwild bench`: systems, prompts, figures and tables."""
