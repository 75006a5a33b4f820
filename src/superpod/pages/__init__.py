"""Self-contained HTML pages for plans and reports, and traces of predicted steps."""

GENERATOR = "superpod-recipes"
"""Name of the generator, which is stored near the start of each file written by this package."""
