"""The data that driver and engine both know; the standard library alone."""
