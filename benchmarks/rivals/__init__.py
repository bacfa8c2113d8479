"""What the workbench is measured against."""
