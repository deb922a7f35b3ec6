"""Text for people: lines that survive a full disk or a closed pipe,
with control characters escaped. No torch.
"""
