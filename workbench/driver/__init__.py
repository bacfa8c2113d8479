"""The part that runs in the kernel: starts engines, feeds trainings; loads no torch."""
