"""One file a question; each prints JSON lines, one a measurement, and judges nothing."""
