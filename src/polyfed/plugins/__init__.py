"""What a federation can do beside its method: one file for each concern, all on one protocol (`engine.plugin.Plugin`).

availability, device_simulation, robust_aggregation, adversaries, frozen_parameters, privacy, secure_sums: their hooks
run in this order, `decode` in the reverse one. Each is there in every federation, and does nothing unless its settings
say so.
"""
