"""What operators see and set: metrics, request traces, switches."""
