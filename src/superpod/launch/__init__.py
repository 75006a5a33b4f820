"""From a recipe to a finished run: checked, rehearsed, submitted, watched, reported."""
