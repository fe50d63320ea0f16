"""What holds for every test: property tests judge values, not how busy the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("ckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ckpt")
