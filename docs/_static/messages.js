/* A message that is pasted into the search box holds values that no page holds, and
   Sphinx's search wants all words on a page. The headings of docs/errors hold only words
   that every such message has: those that the query contains come first. */
if (typeof Search !== "undefined") {
  const words = (text) => text.toLowerCase().match(/\w+/g) || [];
  const search = Search._performSearch;
  Search._performSearch = (query, ...terms) => {
    const results = search(query, ...terms);
    const asked = new Set(words(query));
    const index = Search._index;
    const found = [];
    for (const [title, places] of Object.entries(index.alltitles)) {
      const wanted = words(title);
      if (wanted.length < 3 || !wanted.every((word) => asked.has(word))) continue;
      for (const [page, id] of places) {
        if (index.docnames[page] !== "docs/errors" || id === null) continue;
        const row = [index.docnames[page], title, "#" + id, null, 100 + wanted.length];
        found.push([...row, index.filenames[page], "title"]);
      }
    }
    found.sort((a, b) => a[4] - b[4]); /* results are shown from the last on */
    return [...results, ...found];
  };
}
