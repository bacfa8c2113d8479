"""The live view of a run in the notebook."""

from workbench.notebook.panel.panel import Panel

__all__ = ["Panel"]
