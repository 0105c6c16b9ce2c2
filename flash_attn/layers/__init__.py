"""Layers around attention: rotary position embedding, image patches."""
