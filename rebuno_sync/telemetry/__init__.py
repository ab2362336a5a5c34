"""Telemetry to switch on: :mod:`.opentelemetry` for traces, :mod:`.prometheus` for metrics."""
