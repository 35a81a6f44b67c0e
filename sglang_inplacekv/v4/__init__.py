"""DeepSeek-V4 over the four regions: where its state lies, and its attention behind SGLang's backend.

A page is G tokens, all layers, and G a multiple of 128, so that no block of tokens crosses a page. Of each page:

    what                            rows             where                                  found by
    CSA entries, each CSA layer     G / 4 x d        D, C or T: the page's home, or window  page id (homes, windows)
    CSA index keys, likewise        G / 4 x d_index  device, whatever the page's home       page id (paged.py)
    HCA entries, each HCA layer     G / 128 x d      device, whatever the page's home       page id (paged.py)

Of each running request, in its row of SGLang's req_to_token (requests.py), all layers:

    window                          window x d       device                                 row, position mod window
    compressor journals             8 or 128, fp32   device                                 row, position mod 8 or 128

So capacity is pages, as for every model, and finish, abort and retraction give pages and row back as for every model. A row's
state begins anew with each request: empty or, behind a cached prefix, from the tail record of the prefix's last page, in host
memory (records.py).

Only CSA entries may leave the device: they are most of the bytes and a step reads few of them. Rows of the regions are entries
here, not tokens: `RegionSizes.row_tokens` is 4.
"""
