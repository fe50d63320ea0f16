"""Paddle: its three formats, configs and AOA programs. What the formats share lies here."""
