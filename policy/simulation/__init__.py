"""A discrete-event simulation of a deployment: the planner's own View, Plan and Outcome, true times
and true acceptance.
"""
