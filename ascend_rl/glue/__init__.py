"""Classes that frameworks construct: each joins a framework's class with an algorithm of another room.

The only room that imports frameworks, and only they, or commands that need one, import it.
"""
