"""Where the documentation says more: by titles, since an installed package has no pages."""

PAGE = "Coming from another way to accumulate"


def see(section):
    """A reference to a page or a section of the guide; the page `PAGE` links to each."""
    return f'see "{section}", under "{PAGE}" in the documentation'
