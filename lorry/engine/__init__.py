"""The engine: takes requests, plans steps, runs them, and gives tokens back."""
