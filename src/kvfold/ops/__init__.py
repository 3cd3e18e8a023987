"""Pure tensor functions: no model, no state."""
