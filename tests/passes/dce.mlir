// RUN: secc opt %s -p dce | filecheck %s

// What reaches neither the loss nor a guard goes, blocks included; what only a guard reads stays.

sec.graph "g" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "a" class "A" params 10 trainable 10
  sec.block "metric" class "A" params 10 trainable 10
  sec.case "all" when [] {
    // CHECK: %x = sec.input "x"
    // CHECK-NEXT: %m = sec.input "mask"
    // CHECK-NEXT: %any = sec.glue "aten.any.default" (%m)
    // CHECK-NEXT: sec.guard (%any) equals "True"
    // CHECK-NEXT: %h = sec.call "a" (%x)
    // CHECK-NEXT: %l = sec.glue "aten.sum.default" (%h)
    // CHECK-NEXT: sec.return (%l)
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %m = sec.input "mask" : !sec.tensor<[B], bool>
    %unread = sec.input "unread" : !sec.tensor<[B], bool>
    %any = sec.glue "aten.any.default" (%m) args "$0" : !sec.tensor<[], bool>
    sec.guard (%any) equals "True"
    %h = sec.call "a" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %s = sec.call "metric" (%h) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %mean = sec.glue "aten.mean.default" (%s) args "$0" : !sec.tensor<[], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%l)
  }
}
