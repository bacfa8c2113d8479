"""What the panel says: one file a language, named as the user types it, with the keys of en."""
