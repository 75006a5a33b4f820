"""A recipe at a size, sequence, batch or layout that it does not declare."""
