"""Write recipes as standalone Python files (`recipes export`), and compare two recipes (`recipes diff`)."""
