"""What the panel says: one file a language, named as the user types it, each with the keys of en."""
