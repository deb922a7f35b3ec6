"""Conversations as a model's chat template renders them: one text, its tokens,
and a mask of those that the assistant writes.

    template     files of a template and of the special tokens that it names
    rendering    jinja2 in a sandbox, with what transformers gives to a template
    spans        the assistant's text in a rendering
    bounded      both in a child process with limits on its time and memory
    opening      a template for one preparation: compiled once, its date settled
    records      a record as a conversation
    encode       tokens and mask of a conversation
"""
