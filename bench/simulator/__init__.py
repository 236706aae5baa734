"""The simulator's evidence: tables of docs/research/simulator.md and docs/explanation/policy.md."""
