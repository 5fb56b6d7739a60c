"""Chats: messages to the text that a model reads, by its own template.

Belongs here: what depends on the model's chat format. Token ids of whole prompts, and the text of
answers without such a format, belong to the rooms around it.
"""
