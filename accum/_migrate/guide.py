"""Where the documentation says more: by titles, since an installed package has no pages."""

PAGE = "Coming from another way to accumulate"


def see(section):
    """A reference to a section of the page `PAGE`."""
    return f'see "{section}", under "{PAGE}" in the documentation'
