"""base.py defines every field with its default and meaning; experiments/ holds the presets."""
