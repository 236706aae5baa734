"""What operators see: metrics, traces, logs of decisions, switches, what was learnt."""
