"""The code of pages that needs packages of others; one that the extra `interop` lacks fails here."""

import pytest

from docs.blocks import PAGES, blocks, is_alike, printed

# packages warn of torch and of this machine; what points to a line of a page is an error
pytestmark = pytest.mark.filterwarnings("ignore", "error:::__main__")
PAGES_WITH_OTHERS = [page for page in PAGES if any(block.packages() for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES_WITH_OTHERS)
def test_the_python_of_a_page_runs_with_packages_of_others(page):
    for shown, said in printed(page, with_others=True):
        assert is_alike(shown, said)
