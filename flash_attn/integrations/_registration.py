"""What a ``register()`` changed in another library, in words, and how it is undone."""

import threading

MISSING = object()
lock = threading.RLock()


class Registration:
    """The changes of one ``register()``. ``str()`` says what they are, and ``unregister()`` undoes them.

    ``with register():`` undoes them at the end of the block.
    """

    def __init__(self, library):
        self.library, self.is_active = library, True
        self.changes = []  # sentences
        self._undo = []

    def set(self, place, name, value, sentence=None):
        """Sets an attribute of an object, or an item of a dict."""
        is_dict = isinstance(place, dict)
        old = place.get(name, MISSING) if is_dict else vars(place).get(name, MISSING)

        def undo():
            now = place.get(name, MISSING) if is_dict else vars(place).get(name, MISSING)
            if now is not value:
                return  # somebody else replaced it since
            if old is not MISSING:
                place.__setitem__(name, old) if is_dict else setattr(place, name, old)
            elif is_dict:
                del place[name]
            else:
                delattr(place, name)

        place.__setitem__(name, value) if is_dict else setattr(place, name, value)
        self._undo.append(undo)
        if sentence is not None:
            self.changes.append(sentence)

    def unregister(self):
        """Undoes all changes. A second call does nothing."""
        with lock:
            self.is_active = False
            while self._undo:
                self._undo.pop()()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.unregister()

    def __str__(self):
        state = "" if self.is_active else " (undone)"
        return f"flash_attn in {self.library}{state}: " + "; ".join(self.changes) + ". unregister() undoes it."

    __repr__ = __str__
