"""Text in, text out. No torch, no scheduling."""
