// The switch between versions. It is there only if the folder above the site has a versions.js (`make docs-site`).
(() => {
  const root = document.documentElement.dataset.content_root;
  const list = document.createElement("script");
  list.src = `${root}../versions.js`;
  list.onload = () => {
    const here = new URL(root, location.href).pathname.split("/").filter(Boolean).pop();
    const select = document.createElement("select");
    for (const name of window.siteVersions) select.add(new Option(name, name, name === here, name === here));
    select.onchange = () => { location.href = `${root}../${select.value}/index.html`; };
    const label = document.createElement("label");
    label.className = "versions";
    label.append("Version ", select);
    document.querySelector(".sidebar-brand")?.after(label);
  };
  document.head.append(list);
})();
