"""The Checkpointer: steps, retention, policies, tiers, takeover."""
