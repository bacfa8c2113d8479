"""Built-in recipes: the name of a file here is what the user types."""
