"""Engine-agnostic scheduling: host only, numpy only; it emits `SchedulerOutput` and knows no device."""
