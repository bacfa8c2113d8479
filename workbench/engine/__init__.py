"""The part that runs in the engines, one process a rank; the only ring that imports torch."""
