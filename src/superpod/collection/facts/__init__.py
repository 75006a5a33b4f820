"""Facts about recipes that are known without building them: names, requirements, proof levels, absent recipes."""
