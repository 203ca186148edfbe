"""OpenTelemetry: `traces` listens to the journal, `spans` makes of it what a trace has, `otlp` sends it."""
