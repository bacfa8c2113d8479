"""The notebook's face: magics, panel, completion. Nothing imports it but the notebook."""
