"""OpenTelemetry traces of a job: `traces` listens to the journal, `spans` turns records into spans, `otlp` sends
them."""
