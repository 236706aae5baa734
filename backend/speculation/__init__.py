"""Everything in the backend that knows the policy: one cycle of propose, verified and learn."""
