"""The fork server: one process that has imported everything once, and forks engines from it."""
