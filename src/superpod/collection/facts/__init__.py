"""What is known of recipes without building them: which exist and why others do not, what they need, what is proven."""
