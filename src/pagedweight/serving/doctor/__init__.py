"""`pagedweight doctor`: is everything there that serving needs, and what to say when it is not.

Each module looks at one thing and returns `Finding`s; none raises for what it finds.
"""
