"""Self-contained HTML pages of plans and reports, and traces of predicted steps."""

GENERATOR = "superpod-recipes"
"""Name of the generator, which is stored near the start of every file written here."""
