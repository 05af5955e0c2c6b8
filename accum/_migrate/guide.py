"""Where the documentation says more: by the titles of its page and section, since an installed package has no pages."""

PAGE = "Coming from another way to accumulate"


def see(section):
    """A reference to a section of the guide."""
    return f'see "{section}" on the page "{PAGE}" of the documentation'
