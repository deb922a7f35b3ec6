"""The user's model: builder, parameters on the meta device, requirements,
and initial values by name.
"""
