// Loads Mermaid 11.17.2 from the file beside this one, so drawings need no network.
// mermaid.min.js and LICENSE come unchanged from the npm package mermaid. To take a newer version:
// `npm pack mermaid@11`, copy package/dist/mermaid.min.js and package/LICENSE, and change the
// number above. mermaid.min.js is a classic script; the site imports a module, so this wraps it.
const script = document.createElement("script");
script.src = new URL("mermaid.min.js", import.meta.url).href;
await new Promise((loaded, failed) => {
  script.onload = loaded;
  script.onerror = failed;
  document.head.append(script);
});
export default globalThis.mermaid;
