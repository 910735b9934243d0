"""Turns the tokens of a reply into text, reasoning and tool calls; `formats` has the formats as
data.
"""
